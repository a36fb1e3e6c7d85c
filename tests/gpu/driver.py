"""The driver's calls are found, and its devices are torch's."""

from __future__ import annotations

import json
import sys

import torch

from tiffin.messenger.gpu.cuda_driver import load

if not torch.cuda.is_available():
    print(json.dumps("no GPU"))
    sys.exit(0)
torch.zeros(1).cuda()
driver = load()
print(
    json.dumps(
        {"batches": bool(driver.batches), "uuids": [str(one) for one in driver.device_uuids()]}
    )
)
