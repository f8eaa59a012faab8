"""Predictions with the exported weights, in plain PyTorch."""

import torch
from models import cnn
from safetensors.torch import load_file

task = cnn()
task.model.load_state_dict(load_file("cnn.safetensors"))
task.model.eval()
with torch.no_grad():
    images, level = (torch.stack(column) for column in zip(*task.held_out["alike"], strict=True))
    right = int((task.model(images).argmax(1) == level).sum())
print(f"{right} of {len(level)} right")
