"""What a trained model's neurons do: which fire, what the kernels gain, which can be removed."""
