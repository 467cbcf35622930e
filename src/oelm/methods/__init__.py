"""THE IDEA, pure torch: orthogonal starts, what is frozen when, applying it to any model, proving it."""
