#!/usr/bin/env bash
# Written by: {{ command | comment }}
# Start: bash FILE start, then: bash FILE train; end with a checkpoint: bash FILE stop
# Needs ssh without a password to every host, and the packages in the same place on all of them.

set -euo pipefail

NAME={{ options.name }}
HOSTS=({{ hosts }})
PYTHON={{ options.python | sh }}
CPUS={{ launch.cpus_on_node }}
GPUS={{ options.gpus_per_node }}
SHARED_FOLDER={{ launch.shared_folder | sh }}
TRAIN=({{ train }})
PORT=${RAY_PORT:-6379}

usage() {
  echo "usage: $0 start|train|status|stop
  start   start Ray on every host: ${HOSTS[*]}
  train   start the run on the first host, and show its output; Ctrl-C leaves the run alone
  status  show what runs on each host
  stop    let the run write a checkpoint, then end what start has started, and nothing else"
}

# --- functions that run on a host. Their state is in a folder that only the user can read.

state_of() {
  echo "$HOME/.expert-orchestrator/$1"
}

# Whether the process of a file is the one that was started: its number may have been given to another one since.
runs() {
  local pid started
  [ -f "$1" ] || return 1
  read -r pid started < "$1"
  [ "$(ps -o lstart= -p "$pid" 2> /dev/null | xargs)" = "$started" ]
}

# Starts a command in a session of its own, which lasts when the connection ends.
launch() {
  local file=$1 log=$2
  shift 2
  setsid nohup "$@" > "$log" 2>&1 < /dev/null &
  echo "$! $(ps -o lstart= -p $! | xargs)" > "$file"
}

# Ends the session that launch has started: first its leader, after a while all that is left of it.
end() {
  local file=$1 patience=$2 pid=
  [ ! -f "$file" ] || read -r pid _ < "$file"
  if runs "$file"; then
    pkill -TERM -P "$pid" -f 'orchestrator train' || kill -TERM "$pid"
    while runs "$file" && [ "$patience" -gt 0 ]; do
      sleep 1
      patience=$((patience - 1))
    done
  elif [ -z "$pid" ] || kill -0 "$pid" 2> /dev/null; then
    # Another program has the number now: the session ended long ago.
    rm -f "$file"
    return
  fi
  # The number of a session is not given to another one while processes of it are left.
  pkill -KILL -s "$pid" || true
  rm -f "$file"
}

start_node() {
  local state python=$2 cpus=$3 gpus=$4
  state=$(state_of "$1")
  shift 4
  (umask 077 && mkdir -p "$state")
  if runs "$state/node"; then
    echo "runs already: $(hostname)"
    cat > /dev/null
    return
  fi
  (umask 077 && cat > "$state/token")
  RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$state/token launch "$state/node" "$state/node.log" \
    "$python" -m ray.scripts.scripts start "$@" --num-cpus="$cpus" --num-gpus="$gpus" \
    --dashboard-agent-listen-port=0 --disable-usage-stats --block
  until grep -q 'Ray runtime started' "$state/node.log"; do
    runs "$state/node" || {
      tail -n 20 "$state/node.log" >&2
      return 1
    }
    sleep 0.5
  done
  echo "started Ray on $(hostname)"
}

address_of() {
  "$1" -c 'import ray.util; print(ray.util.get_node_ip_address())'
}

start_run() {
  local state folder=$2 python=$3 address=$4 nodes=$5
  state=$(state_of "$1")
  shift 5
  if ! runs "$state/run"; then
    export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$state/token
    cd "$folder"
    "$python" -m orchestrator.runtime.cluster.await_nodes "$address" "$nodes"
    rm -f "$state/code"
    # shellcheck disable=SC2016
    launch "$state/run" "$state/run.log" \
      bash -c 'code=0; "${@:2}" || code=$?; echo "$code" > "$1"' run "$state/code" "$@" --ray-address "$address"
  fi
  read -r pid _ < "$state/run"
  tail --pid="$pid" -n +1 -f "$state/run.log"
  return "$(cat "$state/code" 2> /dev/null || echo 1)"
}

show() {
  local state what
  state=$(state_of "$1")
  for what in node run; do
    if runs "$state/$what"; then echo "$(hostname): $what runs"; else echo "$(hostname): no $what"; fi
  done
}

end_run() {
  end "$(state_of "$1")/run" 300
}

end_node() {
  local state
  state=$(state_of "$1")
  end "$state/node" 30
  rm -f "$state/token"
}

# --- functions that run here

# Calls a function on a host, with its arguments. Standard input goes to it.
on() {
  local host=$1 script
  shift
  script="set -euo pipefail; $(declare -f); $(printf '%q ' "$@")"
  # In quotes that every login shell understands.
  # shellcheck disable=SC2029
  ssh -o BatchMode=yes "$host" "bash -c '${script//\'/\'\\\'\'}'"
}

# The state of a host has its name, because homes may be shared.
key() {
  echo "$NAME/$1"
}

start() {
  local token address role index=0 host
  # The token reaches the hosts through standard input: a command line would show it to others.
  token=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
  address=$(on "${HOSTS[0]}" address_of "$PYTHON" < /dev/null):$PORT
  for host in "${HOSTS[@]}"; do
    role=(--address="$address")
    [ "$index" -gt 0 ] || role=(--head --port="$PORT" --node-ip-address="${address%:*}" --include-dashboard=false)
    printf %s "$token" | on "$host" start_node "$(key "$host")" "$PYTHON" "$CPUS" "$GPUS" "${role[@]}"
    index=$((index + 1))
  done
}

train() {
  local address
  address=$(on "${HOSTS[0]}" address_of "$PYTHON" < /dev/null):$PORT
  on "${HOSTS[0]}" start_run "$(key "${HOSTS[0]}")" "$SHARED_FOLDER" "$PYTHON" "$address" "${#HOSTS[@]}" "${TRAIN[@]}" < /dev/null
}

status() {
  local host
  for host in "${HOSTS[@]}"; do on "$host" show "$(key "$host")" < /dev/null; done
}

stop() {
  local host
  on "${HOSTS[0]}" end_run "$(key "${HOSTS[0]}")" < /dev/null
  # The head last: without it the other nodes end by themselves, and leave processes behind.
  for host in "${HOSTS[@]:1}" "${HOSTS[0]}"; do on "$host" end_node "$(key "$host")" < /dev/null; done
}

case ${1:-} in
  start | train | status | stop) "$1" ;;
  *)
    usage
    exit 2
    ;;
esac
