"""The words of a strategy string: one spec for each sync rule, codec, route, layout and optimizer."""
