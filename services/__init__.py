"""What makes a process a service, and the launcher of the whole stack."""
