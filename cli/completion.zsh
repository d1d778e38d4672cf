#compdef megaloom
# Completion of `megaloom` for zsh: the counterpart of completion.bash. All words come from the command itself (--help,
# config --defaults), so that they are those of the version that is installed; each answer is kept until the shell ends.
# Where nothing fits, and after =, names of files are offered.

typeset -gA _megaloom_answers

# _megaloom_ask COMMAND [ARGUMENT...]: its output, kept for the next time, in _megaloom_answer.
_megaloom_ask() {
    local key="$*"
    if (( ! ${+_megaloom_answers[$key]} )); then
        _megaloom_answers[$key]=$("$@" 2>/dev/null </dev/null)
    fi
    typeset -g _megaloom_answer=${_megaloom_answers[$key]}
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

_megaloom() {
    emulate -L zsh
    setopt extended_glob
    local megaloom=${words[1]/#\~\//$HOME/} current=${words[CURRENT]} previous=${words[CURRENT - 1]} help word
    local -a parts offered
    local -i i

    # The command, and the verb where it has some: the first words.
    for ((i = 2; i < CURRENT; i++)); do
        word=${words[i]}
        [[ $word == [a-z]* && $#parts -lt 2 ]] || break
        parts+=($word)
        _megaloom_ask $megaloom $parts[1] --help
        # A second word is a verb only of a command that has verbs.
        if [[ $#parts -eq 2 && $_megaloom_answer != *"megaloom $parts "* ]]; then
            parts=($parts[1])
            break
        fi
    done

    if (( ! $#parts )); then
        _megaloom_ask $megaloom --help
        offered=(${(f)"$(awk '/^  [a-z]/ { print $1 }' <<<$_megaloom_answer)"} --help --version)
        compadd -- $offered
        return
    fi

    _megaloom_ask $megaloom $parts --help
    help=$_megaloom_answer
    # After an option that wants a value, and after =, a file.
    if [[ $previous == -* && $'\n'$help == *[[:space:]]$previous(=|', '--[a-z-]##=)* ]]; then
        _files
    elif [[ $current == *=* ]]; then
        compset -P '*='
        _files
    elif [[ $current == -* ]]; then
        offered=(${(f)"$(grep -E '^(  -., |      )--' <<<$help | grep -oE -- '--[a-z][a-z-]*')"})
        compadd -- $offered
    elif [[ $#parts -eq 1 && $help == *"megaloom $parts[1] "[a-z]* ]]; then
        offered=(${(f)"$(sed -nE "s/^(Usage:|      ) megaloom $parts[1] ([a-z]+) .*/\2/p" <<<$help)"})
        compadd -- $offered
    elif [[ $help == *FIELD=VALUE* && -n $current ]]; then
        _megaloom_ask $megaloom config --defaults
        offered=(${(f)"$(_megaloom_fields <<<$_megaloom_answer)"})
        [[ $help == *strategy.FIELD=VALUE* ]] && offered=(${(M)offered:#strategy.*})
        # A field is followed by its value at once, and a run file may stand in the same place.
        compadd -S '' -- $offered
        _files
    else
        _files
    fi
}

_megaloom "$@"
