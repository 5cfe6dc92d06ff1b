"""Code for single warpgroups, warps and lanes that the Pallas language cannot express."""
