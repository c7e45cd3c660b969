"""TorchX components: ``torchx run -s local_cwd components/train.py:train --nproc 2 -- <overrides>``."""
