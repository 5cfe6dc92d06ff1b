"""What `checkpoint` raises, for those who need not import Orbax with it, which takes 0.2 s."""


class CheckpointError(RuntimeError):
    """Checkpoints exist, but none of them can be restored."""


class CannotSave(RuntimeError):
    """A checkpoint could not be written, say because the disk is full."""
