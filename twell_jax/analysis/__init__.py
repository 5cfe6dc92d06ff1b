"""What a trained model's neurons do: which are active, what kernels gain, which can go."""
