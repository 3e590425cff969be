"""The launcher of the whole stack on one machine: the only place that knows all three services."""
