# Fetches the PostgreSQL server from the package archive this Debian-family machine already uses, and unpacks it into
# STATE/postgresql. Needs no root and changes nothing outside STATE: apt works on private lists, cache and status.
#
#   sh fetch.sh STATE OLDEST     STATE: the state directory; OLDEST: the oldest suitable major version
#
# The last line on standard error says why it failed. Run again after an interruption, it starts from scratch.
set -eu
umask 022
state=$1
oldest=$2
work=$state/postgresql.tmp
tree=$work/tree
libraries=$tree/libraries

fail() {
    echo "$*" >&2
    exit 1
}

for tool in apt-get dpkg dpkg-query; do
    command -v "$tool" >/dev/null || fail "there is no $tool here, so this is no Debian or Ubuntu"
done

# The server has this path built in and rejects clients whose time zone it does not find there.
[ -e /usr/share/zoneinfo/UTC ] || fail "the server also needs the time zones of the package tzdata, which are not here"

rm -rf "$work"
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/debs" "$libraries"

# An empty status makes apt name every package the server needs, regardless of the installed ones; the packages to
# fetch are selected below. The hooks are cleared because the machine's own ones clean or refresh its caches; the
# sandbox user could not write here.
: >"$work/status"
cat >"$work/apt.conf" <<EOF
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
#clear Acquire::IndexTargets::deb::DEP-11;
#clear Acquire::IndexTargets::deb::DEP-11-icons;
#clear Acquire::IndexTargets::deb::DEP-11-icons-small;
#clear Acquire::IndexTargets::deb::DEP-11-icons-hidpi;
#clear Acquire::IndexTargets::deb::DEP-11-icons-large;
#clear Acquire::IndexTargets::deb::DEP-11-icons-large-hidpi;
#clear Acquire::IndexTargets::deb::CNF;
Dir::State "$work";
Dir::State::Lists "$work/lists";
Dir::State::status "$work/status";
Dir::Cache "$work/cache";
Dir::Cache::Archives "$work/cache/archives";
Dir::Log "$work";
APT::Sandbox::User "root";
APT::Install-Recommends "false";
APT::Install-Suggests "false";
Acquire::Languages "none";
Acquire::Retries "1";
Acquire::http::Timeout "30";
Acquire::https::Timeout "30";
Debug::NoLocking "true";
EOF
apt() {
    apt-get -q -c "$work/apt.conf" "$@"
}

# An unrelated source may fail: the check below decides whether the packages of the server are known.
apt update >&2 || true
ls "$work"/lists/*_Packages* >/dev/null 2>&1 || fail "none of the machine's package sources can be reached"
apt -s install postgresql >"$work/plan" || fail "the machine's package sources offer no package 'postgresql'"
sed -n 's/^Inst \([^ ]*\) .*/\1/p' "$work/plan" >"$work/names"
major=$(sed -n 's/^postgresql-\([0-9][0-9]*\)$/\1/p' "$work/names" | sort -n | tail -n 1)
[ -n "$major" ] || fail "the package 'postgresql' of this machine's sources names no server version"
[ "$major" -ge "$oldest" ] || fail "this machine's sources offer PostgreSQL $major, and $oldest or newer is needed"

# The C library and what comes with it always stay the machine's own: mixing two versions of it breaks every program.
# LLVM serves only compilation of long queries, the rest has no library the server loads.
library_names() {
    sed -n '/^lib/p; /^zlib1g$/p' "$work/names" |
        grep -v -e '^libc6' -e '^libc-' -e '^libgcc' -e '^libcrypt1$' -e '^libllvm' -e '^libz3-' -e 'perl' \
            -e '^libpam-' -e '-common$' -e '-data$' || true
}

installed() {
    dpkg-query -W -f '${db:Status-Status}\n' "$1" 2>/dev/null | grep -qx installed
}

# Fetches the named packages and unpacks them; all their shared libraries go to one directory, as packages differ on
# whether they use /lib or /usr/lib.
unpack() {
    [ $# -gt 0 ] || return 0
    (cd "$work/debs" && apt download "$@" >&2) || fail "the packages could not be downloaded: $*"
    for deb in "$work"/debs/*.deb; do
        dpkg -x "$deb" "$tree" || fail "$deb could not be unpacked"
        rm "$deb"
    done
    find "$tree/lib" "$tree/usr/lib" -maxdepth 2 -name 'lib*.so.*' \
        -exec mv -f {} "$libraries/" \; 2>/dev/null || true
}

bin=$tree/usr/lib/postgresql/$major/bin
runs() {
    for program in postgres initdb psql pgbench; do
        LD_LIBRARY_PATH=$libraries "$bin/$program" --version >&2 || return 1
    done
}

missing=$(for name in $(library_names); do installed "$name" || echo "$name"; done)
# shellcheck disable=SC2086 # package names hold no spaces
unpack "postgresql-$major" "postgresql-client-$major" $missing
if ! runs; then
    # A library of this machine is too old or damaged, so all of them are fetched.
    # shellcheck disable=SC2046
    unpack $(library_names)
    runs || fail "the fetched server does not run on this machine"
fi

# Without its LLVM library this plug-in would fail the first long query.
rm -rf "$tree/usr/lib/postgresql/$major/lib/bitcode" "$tree/usr/lib/postgresql/$major/lib/llvmjit.so" \
    "$tree/usr/share/doc" "$tree/usr/share/man" "$tree/usr/share/locale" "$tree/etc" "$tree/var" "$tree/lib"
rm -rf "$state/postgresql"
mv "$tree" "$state/postgresql"
