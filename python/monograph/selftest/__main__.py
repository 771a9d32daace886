"""`python -m monograph.selftest`: writes the digests of this CPU to digests.json, which is committed."""

import json

from monograph.selftest.digests import FILE, of_the_cpu

FILE.write_text(json.dumps(of_the_cpu(), indent=1) + "\n")
