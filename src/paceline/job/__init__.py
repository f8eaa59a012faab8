"""Processes of a job: how they find each other, who is a member, which process groups they form.

Nothing is imported here, so that the command line stays light; torch is imported inside functions, except in
`torch_store`.
"""
