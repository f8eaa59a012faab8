"""Scripts that run on the standard library alone, in processes of their own, inside the lab."""
