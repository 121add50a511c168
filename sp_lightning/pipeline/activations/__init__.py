"""The tensors that autograd saves during a unit's call: kept, recomputed, or offloaded to the host."""
