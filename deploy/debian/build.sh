#!/bin/bash
# Build the Debian package into build/deb, and let lintian judge it. Run it by `make deb`.
# $1 is the Python whose pip and build tools are used; the package is for Debian's own /usr/bin/python3.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=$PWD/$1 out=$PWD/build/deb
for tool in dpkg-buildpackage:dpkg-dev dh:debhelper help2man:help2man lintian:lintian /usr/bin/python3:python3; do
	command -v "${tool%%:*}" >/dev/null || { echo "no ${tool%%:*}: apt-get install ${tool##*:}" >&2; exit 1; }
done
pip=("$python" -m pip --disable-pip-version-check --quiet)
rm -rf "$out"
mkdir -p "$out/kvstored/wheels"
cd "$out"
/usr/bin/python3 -m venv --without-pip target # so that pip chooses wheels for that Python
"${pip[@]}" wheel --no-deps --wheel-dir kvstored/wheels ../..
# What operators of a service set up, encryption and remote stores among them: no Debian has these libraries as new as
# they are needed. Mooncake's, for one kind of remote store, would be half of the package.
libraries=("$(echo kvstored/wheels/kvstored-*.whl)[encryption,events,otel]" 'redis[hiredis]>=5' 'obstore>=0.12')
"${pip[@]}" --python target/bin/python download --only-binary :all: --dest kvstored/wheels "${libraries[@]}"
cp -r ../../deploy/debian kvstored/debian
cp -r ../../deploy kvstored/
wheel=$(basename kvstored/wheels/kvstored-*.whl)
version=$(cut -d- -f2 <<<"$wheel")
SOURCE_DATE_EPOCH=$(git -C ../.. log -1 --format=%ct)
export SOURCE_DATE_EPOCH PIP="${pip[*]}"
# 0.3.0.dev7 comes before 0.3.0, for dpkg too.
cat >kvstored/debian/changelog <<EOF
kvstored (${version/.dev/~dev}) unstable; urgency=medium

  * Built of the sources of this version.

 -- $(sed -n 's/^Maintainer: //p' kvstored/debian/control)  $(date --utc -R -d "@$SOURCE_DATE_EPOCH")
EOF
(cd kvstored && dpkg-buildpackage --build=binary --no-sign) >build.log 2>&1 || { tail -40 build.log >&2; exit 1; }
# The project has no mail address; who distributes the package gives its own.
lintian --fail-on error,warning --tag-display-limit 0 --suppress-tags bogus-mail-host,bogus-mail-host-in-debian-changelog ./*.changes
ls "$out"/*.deb
