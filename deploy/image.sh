#!/bin/bash
# Build the container image into build/image, an OCI layout with the one tag `kvstored`, from Debian's packages and ours
# (build/deb), without a registry and without a container engine. Run it by `make image`; it takes root.
#   skopeo copy oci:build/image:kvstored docker://REGISTRY/kvstored:VERSION
set -euo pipefail
cd "$(dirname "$0")/.."
deb=$(ls build/deb/kvstored_*.deb 2>/dev/null) || { echo "no package in build/deb: make deb" >&2; exit 1; }
for tool in mmdebstrap umoci; do
	command -v $tool >/dev/null || { echo "no $tool: apt-get install $tool" >&2; exit 1; }
done
release=$(. /etc/os-release && echo "$VERSION_CODENAME")
version=$(dpkg-deb --field "$deb" Version)
layer=build/image.tar
# A node's directories belong to user 990 in every container, whatever number a Debian would choose.
mmdebstrap --mode=root --variant=minbase --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
	--include=python3,systemd-standalone-sysusers,libstdc++6,zlib1g \
	--customize-hook='chroot "$1" groupadd --gid 990 kvstored' \
	--customize-hook='chroot "$1" useradd --uid 990 --gid kvstored --no-create-home --home-dir /var/lib/kvstored --shell /usr/sbin/nologin kvstored' \
	--customize-hook="copy-in $deb /tmp" \
	--customize-hook='chroot "$1" sh -c "dpkg --install /tmp/kvstored_*.deb && rm /tmp/kvstored_*.deb"' \
	--customize-hook='install -d -o 990 -g 990 -m 0750 "$1/run/kvstored"; install -d -o 990 -g 990 -m 0700 "$1/var/lib/kvstored"' \
	--customize-hook='rm -rf "$1"/var/lib/apt/lists/* "$1"/var/cache/apt/*' \
	"$release" $layer
rm -rf build/image
umoci init --layout build/image
umoci new --image build/image:kvstored
umoci raw add-layer --image build/image:kvstored $layer
umoci config --image build/image:kvstored --author "the kvstored authors" --architecture "$(dpkg --print-architecture)" \
	--config.user 990:990 --config.entrypoint kvstored --config.cmd serve --config.workingdir / \
	--config.env PATH=/usr/bin:/bin --config.volume /run/kvstored --config.volume /var/lib/kvstored \
	--config.stopsignal SIGTERM --config.label "org.opencontainers.image.version=$version"
umoci gc --layout build/image
rm $layer
echo "build/image:kvstored ($version, $(du -sh build/image | cut -f1))"
