"""Fast bodies for the few primitives that need one. Arrays in, arrays out, no graphs."""
