"""Pure decisions: frozen facts in, a verdict with its reason out. No clock, no I/O, no dice."""
