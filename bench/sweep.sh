#!/bin/sh
# shellcheck disable=SC2086  (lists of files)
# Sweeps every policy on every recording: bench/sweep.sh TRACES OUTPUT.csv
#
# TRACES is the folder of the recordings. About 450 replays, half an hour on two cores. A stopped run continues.
set -eu

if [ $# -ne 2 ]; then
    echo "usage: $0 TRACES OUTPUT.csv" >&2
    exit 2
fi
output=$2
chat="$1/mooncake_conversation/conversation_first60.jsonl"
agents="$1/agentic_coding/agentic_12h.jsonl.xz $1/agentic_coding/agentic_3h.jsonl.xz"
capacities=1%,2%,5%,10%,20%
policies=lru,fifo,slru,lfu,2q,arc,lirs,sieve,s3fifo,wtinylfu,gdsf,hazard
rules=all,reuse:2,tinylfu
dial=hazard,write_cost=0.3,hazard,write_cost=1

sweep() {
    part=$1
    shift
    [ -e "$output.$part.csv" ] && [ ! -e "$output.$part.csv.journal" ] && return
    kvoffload sweep "$@" --output "$output.$part.csv" >&2
}

sweep flagship $chat $agents --capacities $capacities --device-blocks 0,0.25x,0.5x,1x --policies lru,hazard
sweep victim $chat $agents --capacities $capacities --device-blocks 0.25x,0.5x,1x \
    --stores on-device-eviction --policies lru,hazard
sweep policies $chat --capacities $capacities --policies $policies
sweep rules $chat --capacities $capacities --policies lru,hazard --admissions $rules
sweep gate $chat $agents --capacities $capacities --device-blocks 1x --policies lru --admissions all,tinylfu
sweep dial $chat --capacities $capacities --policies lru,$dial
sweep agents $agents --capacities 1%,5% --policies $policies
sweep agents_rules $agents --capacities 1%,5% --policies lru,hazard --admissions $rules
sweep agents_gate $agents --capacities 2% --policies lru --admissions all,tinylfu
sweep agents_dial $agents --capacities 1%,5% --policies lru,$dial

# One header, and each combination once. Its first twelve columns identify it, thirteen if a policy has a parameter.
awk -F, 'FNR == 1 && NR > 1 { next } !seen[$1,$2,$3,$4,$5,$6,$7,$8,$9,$10,$11,$12,$13]++' "$output".*.csv > "$output"
rm "$output".*.csv
