"""What `versions` changes about JAX."""

from types import SimpleNamespace

from pallas_kernels.hopper.common import versions


def test_ptxas_is_asked_for_its_version_once(monkeypatch):
    asked = []
    extension = SimpleNamespace(_get_ptxas_isa_version=lambda: asked.append(1) or 90)
    library = SimpleNamespace(_mosaic_gpu_ext=extension)
    monkeypatch.setattr(versions.fragmented_array, "mgpu_lib", library)
    versions.ask_ptxas_once()
    versions.ask_ptxas_once()
    assert [extension._get_ptxas_isa_version() for _ in range(3)] == [90] * 3
    assert len(asked) == 1
