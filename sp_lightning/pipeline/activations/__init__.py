"""What autograd saves of a unit's call: kept, computed again, or waiting on the host."""
