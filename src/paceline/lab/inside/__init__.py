"""Scripts that run inside the lab in processes of their own, with the standard library alone."""
