"""Parameter servers: rank 0 decides, further servers hold parts of the model, workers push gradients."""
