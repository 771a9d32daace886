"""`python -m monograph.diagnosis.selftest`: writes the digests of this CPU to digests.json."""

import json

from monograph.diagnosis.selftest.digests import FILE, of_the_cpu

FILE.write_text(json.dumps(of_the_cpu(), indent=1) + "\n")
