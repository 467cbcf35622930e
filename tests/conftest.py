"""The machine as every test sees it: one thread per process, no hub, none of the user's own settings."""

import os

FOR_TESTS = ("OELM_GOLDEN", "OELM_SHARED", "OELM_SCREENSHOTS")
for name in [name for name in os.environ if name.startswith("OELM_") and name not in FOR_TESTS]:
    del os.environ[name]
os.environ |= {
    "OMP_NUM_THREADS": "1",  # tests run side by side, and busy threads of two processes slow each other
    "OMP_WAIT_POLICY": "passive",
    "HF_HUB_OFFLINE": "1",
}
