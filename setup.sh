#!/usr/bin/env bash
# Makes .venv in this folder with every version of constraints.txt, and does nothing when that is already so.
set -euo pipefail

usage() {
    cat <<'TEXT'
Usage: ./setup.sh [--check]

Makes the virtual environment .venv with Crossward and all it needs, in the versions of constraints.txt.
./tests/run and ./poc/run call it themselves; a second start finds everything in place and returns at once.

  --check   only answer whether .venv is complete and up to date (exit code 0) or not (1)

Needs Python 3.11 or 3.12 with venv and pip. Environment:
  CROSSWARD_TORCH   the torch to install in place of the pinned one, as pip takes it: a wheel on this machine or
                    a requirement, for instance your hospital's GPU build. It is remembered until another one is
                    named; CROSSWARD_TORCH=pinned goes back to the version of constraints.txt.
TEXT
}

root=$(cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")" && pwd)
venv=$root/.venv
python=$venv/bin/python
# What set-up itself knows stays in this folder, which survives when the rest of .venv is made anew.
state=$venv/crossward
log=$state/setup.log
steps=4
began=$SECONDS
ticker=

say() { printf '%s\n' "$*" >&2; }

fail() {
    say "setup: $*"
    exit 1
}

# Another package path, or pip's --user, would let things count as installed that are not in .venv.
unset PYTHONHOME PYTHONPATH
export PIP_USER=no

# Prints "3.11" for "Python 3.11.7"; nothing when the command does not work.
version_of() {
    local words
    words=$("$1" -V 2>/dev/null) || return 0
    words=${words#Python }
    printf '%s' "${words%.*}"
}

torch_wanted() {
    local wanted=${CROSSWARD_TORCH:-}
    if [[ -z $wanted && -f $state/torch ]]; then
        wanted=$(<"$state/torch")
    fi
    if [[ -z $wanted || $wanted == pinned ]]; then
        wanted=$(grep '^torch==' "$root/constraints.txt")
    elif [[ -e $wanted ]]; then
        wanted=$(readlink -f -- "$wanted")
    fi
    printf '%s' "$wanted"
}

# The stamp's first line: an environment can be updated only where it was made, with the Python it was made with.
place() { printf 'Python %s in %s' "$(version_of "$python")" "$root"; }

# The stamp's second line: the hash of everything that decides what gets installed.
inputs() {
    { cat -- "$root/constraints.txt" "$root/pyproject.toml" "$root/setup.sh" && torch_wanted; } |
        { sha256sum 2>/dev/null || shasum -a 256; } | cut -d ' ' -f 1
}

ready() { [[ -f $state/stamp && $(<"$state/stamp") == "$(place)"$'\n'"$(inputs)" ]]; }

find_python() {
    local candidate version found='' without_venv=''
    for candidate in python3.11 python3.12 python3 python; do
        version=$(version_of "$candidate")
        case $version in
            3.11 | 3.12)
                if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
                    printf '%s' "$candidate"
                    return
                fi
                without_venv=${without_venv:-$version}
                ;;
            ?*) found="$found $candidate is $version." ;;
        esac
    done
    if [[ -n $without_venv ]]; then
        fail "Python $without_venv is here without its venv module; on Debian: apt-get install python$without_venv-venv"
    fi
    fail "needs Python 3.11 or 3.12 and found neither.${found} On Debian 12: apt-get install python3 python3-venv"
}

# Says every second on a terminal, else every fifteen, that a step is still at work and on what.
tick() {
    local what=$1 start=$SECONDS pause=15 line
    exec 9>&-
    if [[ -t 2 ]]; then pause=1; fi
    while kill -0 $$ 2>/dev/null; do
        # A sleep that outlives the ticker must not hold a pipe open that somebody reads to its end.
        sleep "$pause" >/dev/null 2>&1
        line=$(grep -E '^ *(Collecting|Downloading|Installing|Building)' "$log" | tail -n 1 | cut -c 1-60) || true
        if [[ -t 2 ]]; then
            printf '\r\033[K%s  %d s  %s' "$what" $((SECONDS - start)) "$line" >&2
        else
            say "$what  $((SECONDS - start)) s  $line"
        fi
    done
}

stop_ticker() {
    [[ -n $ticker ]] || return 0
    # A gentler signal is lost on a ticker that has only just started, and the wait would never end.
    kill -KILL "$ticker" 2>/dev/null || true
    wait "$ticker" 2>/dev/null || true
    ticker=
    if [[ -t 2 ]]; then printf '\r\033[K' >&2; fi
}

# step NUMBER WHAT COMMAND...: runs the command with its output in the log, which is shown when it fails.
step() {
    local what="[$1/$steps] $2" start=$SECONDS code=0
    shift 2
    say "$what"
    printf '\n== %s\n' "$what" >>"$log"
    tick "$what" &
    ticker=$!
    ("$@") >>"$log" 2>&1 || code=$?
    stop_ticker
    if ((code)); then
        say "----- the last lines of $log"
        tail -n 25 "$log" >&2
        say "-----"
        fail "step $what failed (code $code). Put right what the lines above name, then start again."
    fi
    say "$what: done in $((SECONDS - start)) s"
}

# Modules are compiled when first imported: compiling all of them here takes as long as installing them.
pip_install() {
    "$python" -m pip install --no-input --disable-pip-version-check --progress-bar off --no-compile \
        -c "$state/constraints.txt" "$@"
}

make_venv() {
    "$1" -m venv "$venv"
}

torch_is_pinned() { [[ $1 == "$(grep '^torch==' "$root/constraints.txt")" ]]; }

# The pins for these steps: those of torch and its GPU libraries give way to another torch.
write_pins() {
    if torch_is_pinned "$1"; then
        cp -- "$root/constraints.txt" "$state/constraints.txt"
    else
        grep -v -E '^(torch|triton|cuda-.*|nvidia-.*)==' "$root/constraints.txt" >"$state/constraints.txt"
    fi
}

# Keeps the last step from putting the pinned torch in the place of another one.
pin_torch_as_installed() {
    local version
    torch_is_pinned "$1" && return
    version=$("$python" -c 'from importlib.metadata import version; print(version("torch"))')
    echo "torch==$version" >>"$state/constraints.txt"
}

remember_torch() {
    case ${CROSSWARD_TORCH:-} in
        '') ;;
        pinned) rm -f -- "$state/torch" ;;
        *) printf '%s' "$1" >"$state/torch" ;;
    esac
}

install() {
    local base made_here='' torch
    torch=$(torch_wanted)
    if [[ -f $state/stamp && $(head -n 1 "$state/stamp") == "$(place)" ]]; then
        made_here=yes
    fi
    # From here until the new stamp the environment counts as unfinished, and an unfinished one is made anew.
    rm -f -- "$state/stamp"
    : >"$log"
    if [[ -n $made_here ]]; then
        say "setup: bringing $venv up to date"
    else
        base=$(find_python)
        say "setup: making $venv with $base (the first time takes some minutes; the log is $log)"
        find "$venv" -mindepth 1 -maxdepth 1 ! -name crossward -exec rm -rf -- {} +
        step 1 'virtual environment' make_venv "$base"
    fi
    write_pins "$torch"
    # No step builds in isolation: pip's isolated builds take the newest setuptools, whatever the pins say.
    step 2 'setuptools, which builds the package' pip_install setuptools
    step 3 "$torch" pip_install "$torch"
    pin_torch_as_installed "$torch"
    step 4 'crossward and the packages it needs' \
        pip_install --no-build-isolation --use-pep517 -e "${root}[test,bench]"
    remember_torch "$torch"
    printf '%s\n%s\n' "$(place)" "$(inputs)" >"$state/stamp.new"
    mv -f -- "$state/stamp.new" "$state/stamp"
    say "setup: ready after $((SECONDS - began)) s"
}

case ${1:-} in
    '') ;;
    --check) if ready; then exit 0; else exit 1; fi ;;
    -h | --help)
        usage
        exit 0
        ;;
    *) fail "does not know '$1'; see ./setup.sh --help" ;;
esac

if ready; then exit 0; fi
if [[ -e $venv/pyvenv.cfg && ! -d $state ]]; then
    fail "$venv was not made by setup.sh; move it away, then start again"
fi
mkdir -p -- "$state"
exec 9>>"$state/lock"
if command -v flock >/dev/null && ! flock -n 9; then
    say "setup: another set-up of $venv is at work; waiting for it"
    flock 9
fi
trap stop_ticker EXIT
trap 'stop_ticker; fail "interrupted; the next start begins again"' INT TERM
# Whoever held the lock before may have done it all.
ready || install
