"""An arrangement: where units lie on host and device, as the user, the memory and what was learned would have it."""
