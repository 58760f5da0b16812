"""What a store in Redis calls its keys, and the scripts that run on the server.

::

    PREFIX:b:{KEY}     a block: one value, header and pages (see header)
    PREFIX:s:{KEY}     what was learned of it since: a hash of its scores (s) and hits (h)
    PREFIX:r:{KEY}     a record: its tenant, and its bytes with their checksum
    PREFIX:c:{KEY}     who may write that record now; ends by itself
    PREFIX:l:{KEY}     who could last
    PREFIX:i:{N}:...   the books, in N parts: use (a sorted set), sizes (a hash), sums (a hash)

KEY is in hexadecimal digits. A cluster places a key by what stands between braces: a block's two keys lie together, a
record's three do, and each part of the books.
"""

from __future__ import annotations

from kvpager.stored import KEY_BYTES

__all__ = ["CLAIM", "FENCED", "FORGET", "RELEASE", "RENEW", "RESERVE", "SAVE", "STORE", "TICK", "Names"]


class Names:
    """Keys under a prefix."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    def block(self, key: bytes) -> str:
        """A block's header and pages."""
        return f"{self.prefix}:b:{{{key.hex()}}}"

    def scores(self, key: bytes) -> str:
        """A block's scores and hits."""
        return f"{self.prefix}:s:{{{key.hex()}}}"

    def record(self, key: bytes) -> str:
        """A record."""
        return f"{self.prefix}:r:{{{key.hex()}}}"

    def claim(self, key: bytes) -> str:
        """Who may write a record."""
        return f"{self.prefix}:c:{{{key.hex()}}}"

    def last(self, key: bytes) -> str:
        """Who claimed a record last."""
        return f"{self.prefix}:l:{{{key.hex()}}}"

    def books(self, part: int) -> tuple[str, str, str]:
        """Use, sizes and sums of one part of the books."""
        return tuple(f"{self.prefix}:i:{{{self.prefix}:{part}}}:{name}" for name in ("use", "sizes", "sums"))  # type: ignore[return-value]

    def all(self, kind: str) -> str:
        """The pattern of all keys of one kind: "b", "r"."""
        return f"{self.prefix}:{kind}:{{*}}"

    def key(self, name: bytes) -> bytes | None:
        """The key that stands in a name of such a kind; None where there is none."""
        digits = name[name.find(b"{") + 1 : -1]
        try:
            key = bytes.fromhex(digits.decode("ascii"))
        except ValueError:
            return None
        return key if len(key) == KEY_BYTES else None


FENCED = "FENCED"
"""The first word of the error that a fenced writer gets."""

_FENCE = f"""
if #ARGV[1] > 0 and redis.call('GET', KEYS[1]) ~= ARGV[1] then return redis.error_reply('{FENCED} another writes') end
"""

STORE = _FENCE + "return redis.call('SET', KEYS[2], ARGV[2], 'EX', ARGV[3])"
"""KEYS: fence, block. ARGV: epoch, value, seconds."""

# A writer that claimed the record writes while nobody has claimed it since; one that could not claim it (Redis was
# away) while nobody holds it.
SAVE = (
    """
local fence = #KEYS > 3 and KEYS[4]
if fence and redis.call('GET', fence) ~= ARGV[4] then return redis.error_reply('"""
    + FENCED
    + """ another writes') end
local last, holds = redis.call('GET', KEYS[3]), redis.call('GET', KEYS[2])
if #ARGV[1] > 0 then
  if last and last ~= ARGV[1] then return 0 end
elseif holds then
  return 0
end
if #ARGV[2] > 0 then redis.call('SET', KEYS[1], ARGV[2], 'EX', ARGV[3]) else redis.call('UNLINK', KEYS[1]) end
return 1
"""
)
"""KEYS: record, claim, last, and the fence if there is one. ARGV: token or "", value (none: forget), seconds, epoch."""

TICK = """
local tick = math.max(tonumber(redis.call('GET', KEYS[1]) or 0), tonumber(ARGV[1]))
return redis.call('SET', KEYS[1], string.format('%.0f', tick), 'EX', ARGV[2])
"""
"""KEYS: the tick. ARGV: one that may be later, seconds."""

CLAIM = """
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
redis.call('SET', KEYS[2], ARGV[1], 'EX', ARGV[3])
return 1
"""
"""KEYS: claim, last. ARGV: token, milliseconds of the claim, seconds that `last` is kept."""

RENEW = """
local holds = redis.call('GET', KEYS[1])
if holds == ARGV[1] then return redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
if holds or redis.call('GET', KEYS[2]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
"""KEYS and ARGV as CLAIM's; one that ran out is taken again if nobody has had it since."""

RELEASE = """
if redis.call('GET', KEYS[2]) == ARGV[1] then redis.call('SET', KEYS[2], 'nobody', 'KEEPTTL') end
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""
"""KEYS: claim, last. ARGV: token. A renewal that comes late does not take it again."""

# Numbers in scores of the sorted set: uses count up, and a block comes before those that it follows on.
RESERVE = """
local use, sizes, sums = KEYS[1], KEYS[2], KEYS[3]
local stamp = redis.call('HINCRBY', sums, 'use', 1)
local function count(member, sign)
  local told = redis.call('HGET', sizes, member)
  if not told then return end
  local size, payload = string.match(told, '(%d+):(%d+)')
  redis.call('HINCRBY', sums, 'bytes', 0 + sign * size)
  redis.call('HINCRBY', sums, 'payload', 0 + sign * payload)
  redis.call('HINCRBY', sums, string.sub(member, 1, 1), sign)
end
local at = 3
while at < #ARGV do
  local member, size, payload, depth = ARGV[at], ARGV[at + 1], ARGV[at + 2], tonumber(ARGV[at + 3])
  count(member, -1)
  redis.call('HSET', sizes, member, size .. ':' .. payload)
  count(member, 1)
  redis.call('ZADD', use, string.format('%.0f', (stamp + 1) * 1048576 - 1 - math.min(depth, 1048575)), member)
  at = at + 4
end
local gone = {}
while tonumber(redis.call('HGET', sums, 'bytes') or 0) > tonumber(ARGV[1]) do
  local member = redis.call('ZPOPMIN', use)[1]
  if not member then break end
  count(member, -1)
  redis.call('HDEL', sizes, member)
  redis.call('HINCRBY', sums, 'dropped', 1)
  gone[#gone + 1] = member
end
for _, key in ipairs(KEYS) do redis.call('EXPIRE', key, ARGV[2]) end
return {gone, redis.call('HMGET', sums, 'b', 'r', 'payload', 'bytes', 'dropped')}
"""
"""KEYS: a part of the books. ARGV: bytes at most, seconds, and member, size, pages' bytes, depth of each that is used.

Returns the members that make way, and what is held then.
"""

FORGET = """
for _, member in ipairs(ARGV) do
  local told = redis.call('HGET', KEYS[2], member)
  if told then
    local size, payload = string.match(told, '(%d+):(%d+)')
    redis.call('HINCRBY', KEYS[3], 'bytes', 0 - size)
    redis.call('HINCRBY', KEYS[3], 'payload', 0 - payload)
    redis.call('HINCRBY', KEYS[3], string.sub(member, 1, 1), -1)
    redis.call('HDEL', KEYS[2], member)
    redis.call('ZREM', KEYS[1], member)
  end
end
return 1
"""
"""KEYS: a part of the books. ARGV: members."""
