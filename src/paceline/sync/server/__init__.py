"""Parameter servers: sync rules in which workers send gradients to servers and read parameters back."""
