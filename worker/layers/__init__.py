"""The parts that model code is built of."""
