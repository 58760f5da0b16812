"""What runs inside Redis: each command that writes looks at the lease first, in the same breath.

A script is called by its hash, and sent again where the server does not know it (after a restart, say). Errors that
these scripts give begin with a word:

FENCED   the lease is not this epoch's; then the epoch that has it, or "-" for nobody
DAMAGED  the command did not arrive as it was sent
BEHIND   the entry's number does not follow the last one's
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

__all__ = ["ACQUIRE", "APPEND", "ASK", "RELEASE", "RENEW", "WATCH", "Script", "append_sum"]


class Script:
    """A Lua text and the hash by which Redis knows it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()

    def command(self, keys: Sequence[str], arguments: Sequence[object]) -> tuple[object, ...]:
        """The command that calls it, where the server knows it."""
        return ("EVALSHA", self.sha, len(keys), *keys, *arguments)

    def load(self) -> tuple[object, ...]:
        """The command that makes it known."""
        return ("SCRIPT LOAD", self.text)


# Keys: lease, epoch, owner, handover. Arguments: owner, milliseconds. Gives {1, the new epoch} or {0, who has it}.
# An epoch is also above the server's clock in microseconds: where the counter was lost, in a restart or with a Redis
# whose replica had not heard of it yet, no epoch is given twice.
ACQUIRE = Script("""
local held = redis.call('GET', KEYS[1])
if held then return {0, held} end
local last = redis.call('GET', KEYS[2])
if last and redis.call('GET', KEYS[4]) == last and redis.call('GET', KEYS[3]) == ARGV[1] then return {0, '-'} end
local now = redis.call('TIME')
local clock = now[1] * 1000000 + now[2]
if not last or tonumber(last) < clock then redis.call('SET', KEYS[2], string.format('%.0f', clock)) end
redis.call('INCR', KEYS[2])
local epoch = redis.call('GET', KEYS[2])
redis.call('SET', KEYS[3], ARGV[1])
redis.call('SET', KEYS[1], epoch, 'PX', ARGV[2])
redis.call('DEL', KEYS[4])
return {1, epoch}
""")

# Keys: lease, handover. Arguments: epoch, milliseconds. Gives {1, asked to give it up: 1 or 0} or {0, who has it}.
RENEW = Script("""
local held = redis.call('GET', KEYS[1])
if held ~= ARGV[1] then return {0, held or '-'} end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
if redis.call('GET', KEYS[2]) == held then return {1, 1} end
return {1, 0}
""")

# Keys: lease. Arguments: epoch. Gives 1 or, where it was not this epoch's, 0.
RELEASE = Script("""
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
""")

# Keys: lease, owner. Gives {epoch, owner, milliseconds left}, or {} where it is vacant.
WATCH = Script("""
local held = redis.call('GET', KEYS[1])
if not held then return {} end
return {held, redis.call('GET', KEYS[2]) or '', redis.call('PTTL', KEYS[1])}
""")

# Keys: lease, handover. Arguments: milliseconds. Gives the epoch that was asked, or '-' where the lease is vacant.
ASK = Script("""
local held = redis.call('GET', KEYS[1])
if not held then return '-' end
redis.call('SET', KEYS[2], held, 'PX', ARGV[1])
return held
""")

# Keys: lease, tail, stream, requests. Arguments: the sum of all others but the fourth, and of the keys; what to do
# (JSON: epoch, number, begin, trim, ids of requests that follow, ids that are dropped); the entry; its slots, which
# have a checksum in the entry; a request each. Gives the entry's id, also for one that is there already: a writer that
# does not know whether a command arrived sends it again.
APPEND = Script("""
local summed = {table.concat(KEYS, ' '), ARGV[2], ARGV[3]}
for i = 5, #ARGV do summed[#summed + 1] = ARGV[i] end
if redis.sha1hex(table.concat(summed, ' ')) ~= ARGV[1] then return redis.error_reply('DAMAGED command') end
local todo = cjson.decode(ARGV[2])
local held = redis.call('GET', KEYS[1])
if held ~= todo.epoch then return redis.error_reply('FENCED ' .. (held or '-')) end
local id = todo.epoch .. '-' .. todo.number
local tail = redis.call('GET', KEYS[2])
if tail == id then return id end
local epoch, number = string.match(tail or '', '^(%d+)-(%d+)$')
if todo.begin then
  if epoch == todo.epoch and tonumber(number) > tonumber(todo.number) then
    return redis.error_reply('BEHIND ' .. tail)
  end
elseif epoch ~= todo.epoch or tonumber(number) + 1 ~= tonumber(todo.number) then
  return redis.error_reply('BEHIND ' .. (tail or '-'))
end
if todo.begin then redis.call('DEL', KEYS[3]) end
local added = redis.pcall('XADD', KEYS[3], id, 'entry', ARGV[3], 'slots', ARGV[4])
if type(added) == 'table' and added.err then
  if string.find(added.err, 'smaller') then return redis.error_reply('BEHIND stream') end
  return added
end
redis.call('SET', KEYS[2], id)
for i, name in ipairs(todo.whole) do redis.call('HSET', KEYS[4], name, ARGV[4 + i]) end
for _, name in ipairs(todo.dropped) do redis.call('HDEL', KEYS[4], name) end
if todo.trim ~= '' then redis.call('XTRIM', KEYS[3], 'MINID', '=', todo.trim) end
return id
""")


def append_sum(keys: Sequence[str], todo: bytes, entry: bytes, whole: Sequence[bytes]) -> str:
    """The sum that APPEND compares."""
    joined = b" ".join([" ".join(keys).encode(), todo, entry, *whole])
    return hashlib.sha1(joined, usedforsecurity=False).hexdigest()
