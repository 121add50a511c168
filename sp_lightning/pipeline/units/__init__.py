"""A module tree divided into units: which modules stream, which weights stay on the device."""
