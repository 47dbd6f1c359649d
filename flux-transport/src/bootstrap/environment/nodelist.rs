//! Slurm's short form of a list of nodes: `gpu[003-005,9],login1`.

pub(super) fn first(list: &str) -> Option<String> {
    let mut name = String::new();
    let mut rest = list.trim();
    while let Some(character) = rest.chars().next() {
        match character {
            ',' => break,
            '[' => {
                let (numbers, tail) = rest[1..].split_once(']')?;
                let end = numbers.find(['-', ',']).unwrap_or(numbers.len());
                let number = &numbers[..end];
                (!number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
                    .then_some(())?;
                name.push_str(number);
                rest = tail;
            }
            _ if character.is_ascii_alphanumeric() || matches!(character, '-' | '_' | '.') => {
                name.push(character);
                rest = &rest[1..];
            }
            _ => return None,
        }
    }
    (!name.is_empty()).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::first;
    use proptest::prelude::*;

    #[test]
    fn the_first_node_is_named_in_full() {
        for (list, node) in [
            ("login1", "login1"),
            ("a,b", "a"),
            ("gpu[003-005,9],login1", "gpu003"),
            ("gpu[7]", "gpu7"),
            ("gpu[7,1-3]", "gpu7"),
            ("rack1-[01-02]n[4-6]", "rack1-01n4"),
            ("n[1-2].cluster.example", "n1.cluster.example"),
        ] {
            assert_eq!(first(list).as_deref(), Some(node), "{list}");
        }
        for list in ["", ",a", "gpu[", "gpu[]", "gpu[a-b]", "a b", "a]", "[[1]]"] {
            assert_eq!(first(list), None, "{list}");
        }
    }

    proptest! {
        #[test]
        fn any_text_gives_a_name_or_nothing(list in "[ -~é]{0,30}") {
            if let Some(name) = first(&list) {
                prop_assert!(!name.is_empty() && name.len() <= list.len());
                prop_assert!(!name.contains(['[', ']', ',', ' ']));
            }
        }
    }
}
