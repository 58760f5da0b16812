#!/bin/sh
# Start a Redis for kvpager's nodes, or a sentinel that watches one:
#
#   redis.sh server   FOLDER HOST PORT [PRIMARY_HOST PRIMARY_PORT]
#   redis.sh sentinel FOLDER HOST PORT PRIMARY_HOST PRIMARY_PORT [DOWN_MS]
#
# HOST is the name by which others reach it. Its configuration is made in FOLDER at the first start; Redis writes into
# it who is primary. REDIS_PASSWORD protects it where it is set, REDIS_MAXMEMORY bounds it (1gb). It keeps nothing on
# disk: blocks can be computed again, and the journal of running requests lies in the replica's memory, too.
set -eu
kind=$1 folder=$2 host=$3 port=$4 primary=${5:-} primary_port=${6:-6379} down_ms=${7:-1000}
file=$folder/$kind.conf
umask 077
mkdir -p "$folder"

case ${REDIS_PASSWORD:-} in
  *[!A-Za-z0-9._~-]*) echo "redis.sh: REDIS_PASSWORD has other characters than letters, digits and . _ ~ -" >&2; exit 1 ;;
esac
if [ -z "${REDIS_PASSWORD:-}" ] && [ "$host" != 127.0.0.1 ]; then
  echo "redis.sh: REDIS_PASSWORD is not set, and others reach $host" >&2
  exit 1
fi

if [ -s "$file" ] && [ "$kind" = server ]; then
  # It was there before and comes back empty. Its replica must not copy that, so the sentinels get time to promote it.
  sleep "${REDIS_RESTART_PAUSE:-5}"
fi
if [ ! -s "$file" ]; then
  {
    echo "port $port"
    echo "dir $folder"
    if [ "$host" = 127.0.0.1 ]; then echo "bind 127.0.0.1"; else echo "bind * -::*"; fi
    if [ "$kind" = server ]; then
      echo 'save ""'
      echo "appendonly no"
      echo "maxmemory ${REDIS_MAXMEMORY:-1gb}"
      # Only what has a time to live makes way, the longest unused first: blocks do, a journal does not.
      echo "maxmemory-policy volatile-lru"
      echo "repl-diskless-sync yes"
      echo "repl-diskless-sync-delay 0"
      # Blocks are large: a replica may fall behind by some hundred of them before it has to begin anew.
      echo "repl-backlog-size 64mb"
      echo "client-output-buffer-limit replica 512mb 256mb 60"
      echo "replica-announce-ip $host"
      echo "replica-announce-port $port"
      if [ -n "${REDIS_PASSWORD:-}" ]; then
        echo "requirepass $REDIS_PASSWORD"
        echo "masterauth $REDIS_PASSWORD"
      fi
      if [ -n "$primary" ]; then echo "replicaof $primary $primary_port"; fi
    else
      echo "sentinel resolve-hostnames yes"
      echo "sentinel announce-hostnames yes"
      echo "sentinel announce-ip $host"
      echo "sentinel announce-port $port"
      echo "sentinel monitor kvpager $primary $primary_port 2"
      echo "sentinel down-after-milliseconds kvpager $down_ms"
      echo "sentinel failover-timeout kvpager 5000"
      echo "sentinel parallel-syncs kvpager 1"
      if [ -n "${REDIS_PASSWORD:-}" ]; then echo "sentinel auth-pass kvpager $REDIS_PASSWORD"; fi
    fi
  } > "$file.new"
  mv "$file.new" "$file"
fi
if [ "$kind" = sentinel ]; then exec redis-server "$file" --sentinel; fi
exec redis-server "$file"
