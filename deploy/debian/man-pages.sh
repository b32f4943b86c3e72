#!/bin/bash
# Write the man pages of kvstored, kvctl and their commands into the directory $2, from what --help says, by help2man.
# $1 is the Python that has both installed.
set -euo pipefail
python=$1 out=$2
bin=$(dirname "$python")
mkdir -p "$out"
compiled=$(mktemp -d) # what Python compiles of imports, once for all pages, and not in the package
trap 'rm -r "$compiled"' EXIT
export COLUMNS=100 PYTHONPYCACHEPREFIX=$compiled LC_ALL=C.UTF-8
version=$("$python" "$bin/kvctl" --version | awk '{ print $2; exit }')

# argparse's help, with the headings and examples as help2man knows them.
shown() { # PROGRAM [COMMAND]
	"$python" "$bin/$1" "${@:2}" --help |
		awk '!usage && /^$/ { print usage = line } !usage { sub(/^ +/, ""); line = line (line ? " " : "") $0; next } { print }' |
		sed -E '
		1s/^usage: /Usage: /
		s/^(options|positional arguments|commands|examples|exit codes):$/\u&/
		/^Examples:$/,/^$/ s/^  ([^ ])/  $ \1/'
}

page() { # TITLE PROGRAM [COMMAND]
	local title=$1 name work
	shift
	name=$(IFS=-; echo "$*")
	work=$(mktemp -d)
	shown "$@" >"$work/help"
	[ -n "$title" ] || title=$(awk -v RS= 'NR == 2 { gsub("\n", " "); sub(/[.:].*/, ""); print tolower(substr($0, 1, 1)) substr($0, 2) }' "$work/help")
	printf '#!/bin/sh\ncase $1 in --version) echo "%s %s";; *) cat "%s/help";; esac\n' "$name" "$version" "$work" >"$work/$name"
	chmod +x "$work/$name"
	help2man --no-info --section 8 --name "${title:-$*}" --source kvstored --output "$out/$name.8" "$work/$name"
	rm -r "$work"
}

page 'tiered KV-cache storage daemon for LLM inference' kvstored
page 'look at and steer a live kvstored' kvctl
for program in kvstored kvctl; do
	for command in $(shown $program | sed -nE 's/^    ([a-z][a-z-]*)( .*|$)/\1/p'); do page '' $program "$command"; done
done
