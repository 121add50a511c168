"""Work between steps: findings about units, the places of weights, and the occasions of their moves."""
