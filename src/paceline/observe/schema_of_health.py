"""Fields of the records about numbers that went wrong, and what was done; see `schema`."""

SKIP = {
    "step": "int: index of the step that was left out",
    "reason": "str: what was wrong, and on which rank",
}
LOWER_RATE = {
    "step": "int: index of the step at which the loss was seen to diverge",
    "multiplier": "float: of every rate from now on",
    "reason": "str: what was wrong, and on which rank",
}
ROLL_BACK = {
    "step": "int: index of the step that went wrong",
    "checkpoint": "str: name of the one that was loaded",
    "left_out": "list: first and last index of the steps that are not taken again",
    "reason": "str: what was wrong, and on which rank",
}
