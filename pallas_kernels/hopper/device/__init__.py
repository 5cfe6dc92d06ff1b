"""Code of single warpgroups, warps and lanes: what the Pallas language does not say."""
