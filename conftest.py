"""Settings of every test run: one thread, so that the test processes of a small machine do not fight."""

import torch

torch.set_num_threads(1)
