"""Speed, measured as ratios: Paceline against the bare PyTorch loop and against other libraries.

Nothing here is imported by the package, and no test asserts a time. See README.md.
"""
