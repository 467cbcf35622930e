"""Step time, memory, floating-point operations and attention statistics of a run."""
