#!/bin/sh
# Write the man pages of kvstored and kvctl into the directory $2, from the --help of each command, by help2man. $1 is
# the Python that has both installed.
set -eu
python=$1 out=$2
bin=$(dirname "$python")
mkdir -p "$out"
export COLUMNS=100 PYTHONDONTWRITEBYTECODE=1 LC_ALL=C.UTF-8

page() { # PROGRAM SECTION TITLE [COMMAND]
	program=$1 section=$2 title=$3 command=${4:-}
	run=$(mktemp)
	printf '#!/bin/sh\nexec "%s" "%s/%s" "$@"\n' "$python" "$bin" "$program" >"$run"
	[ -z "$command" ] || printf '#!/bin/sh\ncase $1 in --version) exec "%s" "%s/%s" --version;; esac\nexec "%s" "%s/%s" %s "$@"\n' \
		"$python" "$bin" "$program" "$python" "$bin" "$program" "$command" >"$run"
	chmod +x "$run"
	name=$program${command:+-$command}
	help2man --no-info --no-discard-stderr --section "$section" --name "$title" --source kvstored \
		--output "$out/$name.$section" "$run"
	sed -i "s,$(basename "$run"),$name,g; s,$(basename "$run" | tr a-z A-Z),$(echo "$name" | tr a-z A-Z),g" "$out/$name.$section"
	rm "$run"
}

commands() { # PROGRAM: the names after "COMMAND" in its help, with the first words of each
	"$python" "$bin/$1" --help | sed -n 's/^    \([a-z][a-z-]*\)\( .*\|$\)/\1/p'
}

page kvstored 8 'tiered KV-cache storage daemon for LLM inference'
page kvctl 8 'look at and steer a live kvstored'
for each in $(commands kvstored); do page kvstored 8 "kvstored $each" "$each"; done
for each in $(commands kvctl); do page kvctl 8 "kvctl $each" "$each"; done
