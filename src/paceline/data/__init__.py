"""Data: which samples a step trains on, who reads them, and how they reach the device.

`order` and `work` decide (pure), `loader` acts; `text` and `tokens` make a source of text.
"""
