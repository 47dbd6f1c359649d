"""Other libraries' layers computed by flux_tp. Each module imports its library."""
