# Completion of `megaloom` for bash: commands, their verbs and options, and the fields of a run file. All words come from
# the command itself (--help, config --defaults), so that they are those of the version that is installed; each answer is
# kept until the shell ends. Where nothing fits, names of files are offered.

declare -gA _megaloom_answers

# _megaloom_ask COMMAND [ARGUMENT...]: its output, kept for the next time, in _megaloom_answer.
_megaloom_ask() {
    local key="$*"
    if [[ ! -v '_megaloom_answers[$key]' ]]; then
        _megaloom_answers[$key]=$("$@" 2>/dev/null </dev/null)
    fi
    _megaloom_answer=${_megaloom_answers[$key]}
}

# The fields of `config --defaults`, written as a.b.c= (those that others lie in have no value of their own).
_megaloom_fields() {
    awk '/^ *[a-z_0-9]+:/ {
        depth = match($0, /[^ ]/) / 2
        line = substr($0, match($0, /[^ ]/))
        name[int(depth)] = substr(line, 1, index(line, ":") - 1)
        value = substr(line, index(line, ":") + 1)
        sub(/(^| )#.*/, "", value)
        if (value !~ /[^ ]/)
            next
        path = name[0]
        for (i = 1; i <= int(depth); i++)
            path = path "." name[i]
        print path "="
    }'
}

# _megaloom_offer WORDS CURRENT: those of the words that begin like the current one.
_megaloom_offer() {
    mapfile -t COMPREPLY < <(compgen -W "$1" -- "$2")
}

_megaloom() {
    local megaloom=${1/#\~\//$HOME/} current=$2 previous=$3
    local -a command=()
    local i word help words=""
    COMPREPLY=()

    # The command, and the verb where it has some: the first words.
    for ((i = 1; i < COMP_CWORD; i++)); do
        word=${COMP_WORDS[i]}
        [[ $word == [a-z]* && ${#command[@]} -lt 2 ]] || break
        command+=("$word")
        _megaloom_ask "$megaloom" "${command[0]}" --help
        # A second word is a verb only of a command that has verbs.
        [[ ${#command[@]} -eq 2 && $_megaloom_answer != *"megaloom ${command[*]} "* ]] && { unset 'command[1]'; break; }
    done

    if [[ ${#command[@]} -eq 0 ]]; then
        _megaloom_ask "$megaloom" --help
        words="$(awk '/^  [a-z]/ { print $1 }' <<<"$_megaloom_answer") --help --version"
        _megaloom_offer "$words" "$current"
        return
    fi

    _megaloom_ask "$megaloom" "${command[@]}" --help
    help=$_megaloom_answer
    # After an option that wants a value, and after =, a file.
    if [[ $previous == -* && $help =~ (^|[[:space:]])"$previous"(=|, --[a-z-]+=) ]]; then
        return
    fi
    if [[ $current == -* ]]; then
        words=$(grep -E '^(  -., |      )--' <<<"$help" | grep -oE -- '--[a-z][a-z-]*')
        _megaloom_offer "$words" "$current"
    elif [[ ${#command[@]} -eq 1 && $help == *"megaloom ${command[0]} "[a-z]* ]]; then
        words=$(sed -nE "s/^(Usage:|      ) megaloom ${command[0]} ([a-z]+) .*/\2/p" <<<"$help")
        _megaloom_offer "$words" "$current"
    elif [[ $help == *FIELD=VALUE* && $previous != = && $current != = && -n $current ]]; then
        _megaloom_ask "$megaloom" config --defaults
        words=$(_megaloom_fields <<<"$_megaloom_answer")
        [[ $help == *strategy.FIELD=VALUE* ]] && words=$(grep '^strategy\.' <<<"$words")
        _megaloom_offer "$words" "$current"
        # A field is followed by its value at once. Outside of a completion, as in a test, there is nothing to set.
        [[ ${#COMPREPLY[@]} -gt 0 ]] && compopt -o nospace 2>/dev/null
        # A run file may stand in the same place.
        while IFS= read -r word; do
            COMPREPLY+=("$(printf '%q' "$word")")
        done < <(compgen -f -- "$current")
    fi
}

complete -o default -F _megaloom megaloom
