"""A policy in forty lines: LRU in which new blocks of long prompts age faster.

Chat traffic mixes conversations, which return, and long one-off prompts, which do not. In recorded traffic
four in five prompts of one or two blocks are used again, and one in three prompts of 64 blocks or more. So a
new block ages faster the longer its prompt was. A block that was used again ages as in LRU.

    kvoffload replay chat --policy examples/my_policy.py:MyPolicy
"""

from kvoffload import BlockwisePolicy

PROVEN = 0
IMPATIENCE = 0.5
"""Factor by which a new block ages faster for each doubling of its prompt; 0 is nearly LRU."""


class MyPolicy(BlockwisePolicy):
    name = "my-policy"
    good_for = "a mix of conversations and long prompts that never come back"

    def __init__(self, index):
        super().__init__(index)
        self.reset()

    def reset(self):
        self.now = 0
        self.group_of = {}  # slot -> PROVEN, or the number of bits of its prompt's length
        self.last_use = [{} for _ in range(32)]  # of each group: slot -> time, the coldest first

    def hit(self, slot):
        self.move(slot, PROVEN)

    def refresh(self, slot):
        self.move(slot, self.group_of[slot])

    def replace(self, keys, slots, num_free, protected):
        self.new_group = len(keys).bit_length()
        super().replace(keys, slots, num_free, protected)

    def insert(self, slot, key):
        self.now += 1
        self.group_of[slot] = self.new_group
        self.last_use[self.new_group][slot] = self.now

    def victim(self, key, protected):
        coldest = (next((s for s in group if s not in protected), None) for group in self.last_use)
        slot = max((slot for slot in coldest if slot is not None), key=self.impatience)
        self.forget(slot)
        return slot

    def impatience(self, slot):
        group = self.group_of[slot]
        return (self.now - self.last_use[group][slot]) * (1 + IMPATIENCE * group)

    def move(self, slot, group):
        self.forget(slot)
        self.group_of[slot] = group
        self.last_use[group][slot] = self.now

    def forget(self, slot):
        del self.last_use[self.group_of.pop(slot)][slot]

    def order(self):
        return [slot for group in self.last_use for slot in group]
