"""Shadow managers, which run beside a serving manager and estimate the hit ratio of other settings."""

from kvoffload.whatif.estimate import Estimate as Estimate
from kvoffload.whatif.setting import WhatIf as WhatIf
from kvoffload.whatif.setting import WhatIfs as WhatIfs
from kvoffload.whatif.shadows import Shadows as Shadows
