#!/bin/bash
# Become systemd, as the first process of the namespaces that `unshare` has made, in the Debian tree $1.
set -euo pipefail
tree=$1
mount --make-rprivate /
mount --bind "$tree" "$tree"
cd "$tree"
mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
for place in run tmp dev; do mount -t tmpfs -o mode=755 "$place" $place; done
chmod 1777 tmp
mkdir -p dev/pts dev/shm
for node in null zero full random urandom tty; do
	touch dev/$node
	mount --bind /dev/$node dev/$node
done
mount -t devpts -o newinstance,ptmxmode=0666 devpts dev/pts
mount -t tmpfs shm dev/shm
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
ln -s null dev/kmsg
# Where the machine has the groups of old beside those of new (hybrid), systemd gets the same.
if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
	mount -t cgroup2 cgroup sys/fs/cgroup
else
	mount -t tmpfs -o mode=755 cgroup sys/fs/cgroup
	mkdir sys/fs/cgroup/systemd sys/fs/cgroup/unified
	mount -t cgroup -o none,name=systemd cgroup sys/fs/cgroup/systemd
	mount -t cgroup2 cgroup sys/fs/cgroup/unified
fi
mkdir -p mnt
pivot_root . mnt
umount -l mnt
exec env -i container=unshare PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd --system \
	--log-target=console --show-status=no systemd.unit=multi-user.target
