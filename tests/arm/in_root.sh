#!/bin/sh
# Usage: in_root.sh ROOT REPOSITORY PATH...
# Run tests of the repository inside the root directory of another system. The mounts end with the process.
exec unshare --mount sh -e -c '
root=$0 repository=$1
shift
mkdir -p "$root/repository"
mount --rbind /proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
mount --bind "$repository" "$root/repository"
exec chroot "$root" /usr/bin/env -i PATH=/usr/bin:/bin:/usr/sbin:/sbin HOME=/root LANG=C.UTF-8 PYTHONDONTWRITEBYTECODE=1 \
    sh -c "cd /repository && exec nice python3 -m pytest -q -n 0 -p no:cacheprovider \"\$@\"" sh "$@"
' "$@"
