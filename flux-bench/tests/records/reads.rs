//! Which environment variables Rust sources read, found in their text.
//!
//! Invariant: what stands in a comment, in a message or in code of tests alone is no read. A read
//! is a call of one of [`READERS`] whose first argument is a string, or the name of a constant that
//! is one. Whoever reads variables by a function of another name adds it there: until then they
//! count as not read.

use std::collections::{BTreeMap, BTreeSet};

/// Functions and macros that read the variable of their first argument: those of the standard
/// library, and closures over them and parameters in their place.
const READERS: [&str; 9] =
    ["var", "var_os", "option_env", "env", "folder", "path", "variable", "lookup", "set"];

/// Methods of `vars`, a set of variables, that read the one of their first argument.
const READERS_OF_SETS: [&str; 4] = ["value", "get", "world", "below"];

/// A part of a source's code.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Token {
    /// A name, a keyword or a number.
    Word(String),
    /// What stands between quotes, escapes as they are written.
    Text(String),
    /// Any other sign.
    Sign(char),
}
use Token::{Sign, Text, Word};

/// The variables that these sources read.
pub(crate) fn reads<'a>(sources: impl IntoIterator<Item = &'a str>) -> BTreeSet<String> {
    let sources: Vec<Vec<Token>> =
        sources.into_iter().map(|text| without_tests(&tokens(text))).collect();
    let constants: BTreeMap<&str, &str> =
        sources.iter().flat_map(|tokens| constants(tokens)).collect();
    sources
        .iter()
        .flat_map(|tokens| calls(tokens))
        .filter_map(|argument| named(argument, &constants))
        .collect()
}

/// The code of a source, without comments.
fn tokens(text: &str) -> Vec<Token> {
    let mut tokens = Vec::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let length = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            block(rest)
        } else if let Some((open, close)) = raw(rest) {
            let within = &rest[open..];
            let end = within.find(&close).unwrap_or(within.len());
            tokens.push(Text(within[..end].to_owned()));
            (open + end + close.len()).min(rest.len())
        } else if first == '"' {
            let end = quoted(&rest[1..]);
            tokens.push(Text(rest[1..=end].to_owned()));
            (end + 2).min(rest.len())
        } else if first == '\'' {
            // A character, or a lifetime, whose name is no variable's.
            character(rest)
        } else if is_word(first) {
            let length = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
            tokens.push(Word(rest[..length].to_owned()));
            length
        } else {
            if !first.is_whitespace() {
                tokens.push(Sign(first));
            }
            first.len_utf8()
        };
        rest = &rest[length..];
    }
    tokens
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Bytes of the comment that the text begins with, and of those within it.
fn block(text: &str) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at < text.len() {
        let rest = &text.as_bytes()[at..];
        if rest.starts_with(b"/*") {
            (depth, at) = (depth + 1, at + 2);
        } else if rest.starts_with(b"*/") {
            (depth, at) = (depth - 1, at + 2);
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    text.len()
}

/// Bytes before the content of the raw string that the text begins with, and what ends it.
fn raw(text: &str) -> Option<(usize, String)> {
    let after = text.strip_prefix("br").or_else(|| text.strip_prefix('r'))?;
    let hashes = after.len() - after.trim_start_matches('#').len();
    let open = text.len() - after.len() + hashes + 1;
    after[hashes..].starts_with('"').then(|| (open, format!("\"{}", "#".repeat(hashes))))
}

/// Bytes of a string's content, of the text behind its first quote.
fn quoted(text: &str) -> usize {
    let mut escaped = false;
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'"' => return at,
            _ => {}
        }
    }
    text.len()
}

/// Bytes of the character that the text begins with, or of the sign of a lifetime.
fn character(text: &str) -> usize {
    let mut chars = text.char_indices().skip(1);
    match (chars.next(), chars.next()) {
        // The sign behind the escape may be the quote.
        (Some((_, '\\')), Some(_)) => {
            chars.find(|&(_, c)| c == '\'').map_or(text.len(), |(at, _)| at + 1)
        }
        (Some(_), Some((at, '\''))) => at + 1,
        _ => 1,
    }
}

/// The code without items that are of tests alone.
fn without_tests(tokens: &[Token]) -> Vec<Token> {
    let mut kept = Vec::new();
    let mut rest = tokens;
    while let Some(first) = rest.first() {
        let length = if is_of_tests(rest) { item(rest) } else { 0 };
        if length == 0 {
            kept.push(first.clone());
        }
        rest = &rest[length.max(1)..];
    }
    kept
}

/// Whether an item begins here that only tests have.
fn is_of_tests(tokens: &[Token]) -> bool {
    let [Sign('#'), Sign('['), Word(cfg), Sign('('), rest @ ..] = tokens else { return false };
    let condition: Vec<&Token> = rest.iter().take_while(|&token| *token != Sign(']')).collect();
    let has = |word: &str| condition.contains(&&Word(word.to_owned()));
    cfg == "cfg" && has("test") && !has("not")
}

/// How many tokens the item has that begins here, with its attributes: to its semicolon or the end
/// of its braces.
fn item(tokens: &[Token]) -> usize {
    let (mut depth, mut braces) = (0_u32, 0_u32);
    for (at, token) in tokens.iter().enumerate() {
        match token {
            Sign('(' | '[') => depth += 1,
            Sign(')' | ']') => depth = depth.saturating_sub(1),
            Sign('{') => braces += 1,
            Sign('}') => braces = braces.saturating_sub(1),
            _ => {}
        }
        if depth == 0 && braces == 0 && matches!(token, Sign(';' | '}')) {
            return at + 1;
        }
    }
    tokens.len()
}

/// Constants that are one string, and the string.
fn constants(tokens: &[Token]) -> impl Iterator<Item = (&str, &str)> {
    tokens.windows(7).filter_map(|window| match window {
        [Word(word), Word(name), Sign(':'), Sign('&'), Word(of), Sign('='), Text(text)]
            if word == "const" && of == "str" =>
        {
            Some((name.as_str(), text.as_str()))
        }
        _ => None,
    })
}

/// The first arguments of what reads variables, where they are one token.
fn calls(tokens: &[Token]) -> impl Iterator<Item = &Token> {
    (0..tokens.len()).filter_map(|at| {
        let Word(name) = &tokens[at] else { return None };
        let of_set =
            at >= 2 && tokens[at - 1] == Sign('.') && tokens[at - 2] == Word("vars".to_owned());
        let method = at >= 1 && tokens[at - 1] == Sign('.');
        let reads = READERS.contains(&name.as_str()) && !method
            || READERS_OF_SETS.contains(&name.as_str()) && of_set;
        let arguments = match &tokens[at + 1..] {
            [Sign('!'), Sign('('), arguments @ ..] | [Sign('('), arguments @ ..] if reads => {
                arguments
            }
            // The field of a `flux_cuda::library::Search`.
            [Sign(':'), arguments @ ..] if name == "variable" => arguments,
            _ => return None,
        };
        // A longer one is made by other code, which is no name that can be looked up.
        matches!(arguments, [_, Sign(')' | ','), ..]).then(|| &arguments[0])
    })
}

/// The variable that an argument names.
fn named(argument: &Token, constants: &BTreeMap<&str, &str>) -> Option<String> {
    match argument {
        Text(text) => Some(text.clone()),
        Word(name) => constants.get(name.as_str()).map(|text| (*text).to_owned()),
        Sign(_) => None,
    }
}
