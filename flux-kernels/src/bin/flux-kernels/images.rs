//! The table of kernel images: the key of what each is compiled from, and its resources.
//!
//! Invariant: a row is of an image without defects, and one release of the compiler gave all rows.
//! A key covers all headers and no compiler, as in the cache of cubins.
//!
//! ```text
//! # flux kernel images, NVRTC 13.0.88
//! arch,kernel,key,registers,static shared,instructions
//! sm_90a,flux_fill,0123456789abcdef,22,0,232
//! ```

use flux_kernels::nvrtc::{Arch, KernelSource};
use flux_kernels::{FunctionReport, Report, Selection, Source, image_key, sources_ahead};
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Begin of the first line, before the compiler's release.
const HEAD: &str = "# flux kernel images, NVRTC ";
/// Second line.
const COLUMNS: &str = "arch,kernel,key,registers,static shared,instructions";
/// Hopper's kernel, and the portable one with the most and the least shared memory, on which its
/// stages depend. For sm_80 it has tiles of 16-bit operands. For sm_120 it has large ones and those
/// of 8-bit operands. PTX is of one tile of each op.
const ARCHS: [Arch; 5] = [Arch::Sm90a, Arch::Sm80, Arch::Sm120, Arch::Compute80, Arch::Compute89];
/// How many images with a row are compiled all the same, about 3 s of work each.
const SAMPLE: usize = 6;

/// The image of a source for an architecture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Image {
    pub(crate) arch: Arch,
    pub(crate) source: Source,
    key: String,
}

/// Architecture and kernel.
type Name = (&'static str, String);

impl Image {
    fn new(arch: Arch, source: Source) -> Self {
        let key = image_key(&KernelSource::ours(&source, arch));
        Self { arch, source, key }
    }

    /// The images of the table.
    pub(crate) fn all() -> Vec<Self> {
        sources().map(|(arch, source)| Self::new(arch, source)).collect()
    }

    fn name(&self) -> Name {
        (self.arch.name(), self.source.name.clone())
    }
}

/// What the images are compiled from.
fn sources() -> impl Iterator<Item = (Arch, Source)> {
    let of = |arch| sources_ahead(arch, &Selection::Cover.variants(arch));
    ARCHS.into_iter().flat_map(move |arch| of(arch).into_iter().map(move |source| (arch, source)))
}

impl fmt::Display for Image {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.arch.name(), self.source.name)
    }
}

/// What an image takes: the most registers and static shared memory of its functions, and the
/// instructions of all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Resources {
    registers: u32,
    shared_bytes: u32,
    instructions: u32,
}

impl Resources {
    /// `None` of PTX, which has no functions yet.
    fn of(report: &Report) -> Option<Self> {
        let functions = report.functions.iter();
        let with = |all: Self, f: &FunctionReport| Self {
            registers: all.registers.max(f.registers),
            shared_bytes: all.shared_bytes.max(f.shared_bytes),
            instructions: all.instructions + f.instructions,
        };
        (!report.functions.is_empty()).then(|| functions.fold(Self::default(), with))
    }
}

/// Resources in words.
struct Words(Option<Resources>);

impl fmt::Display for Words {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(Resources { registers, shared_bytes, instructions }) = self.0 else {
            return f.write_str("PTX");
        };
        write!(
            f,
            "{registers} registers, {shared_bytes} B static shared, {instructions} instructions"
        )
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Row {
    key: String,
    resources: Option<Resources>,
}

/// Rows by architecture and kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Table {
    release: String,
    rows: BTreeMap<Name, Row>,
}

/// The text that [`Table::parse`] reads.
impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{HEAD}{}\n{COLUMNS}", self.release)?;
        self.rows.iter().try_for_each(|((arch, kernel), Row { key, resources })| {
            write!(f, "{arch},{kernel},{key},")?;
            match resources {
                Some(Resources { registers, shared_bytes, instructions }) => {
                    writeln!(f, "{registers},{shared_bytes},{instructions}")
                }
                None => writeln!(f, ",,"),
            }
        })
    }
}

impl Table {
    /// Reads a table, whose rows are in order.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let mut lines = (1..).zip(text.lines());
        let mut next = || lines.next().map_or("", |(_, line)| line);
        let (head, columns) = (next(), next());
        let (Some(release), COLUMNS) = (head.strip_prefix(HEAD), columns) else {
            return Err(format!("the first lines are not \"{HEAD}...\" and {COLUMNS:?}"));
        };
        let mut rows = BTreeMap::new();
        for (number, line) in lines {
            let (name, row) = row(line).map_err(|why| format!("line {number}: {why}"))?;
            if rows.last_key_value().is_some_and(|(last, _)| *last >= name) {
                return Err(format!("line {number}: {} {} is not in order", name.0, name.1));
            }
            rows.insert(name, row);
        }
        Ok(Self { release: release.to_owned(), rows })
    }

    /// The row of an image, where it is of the image's sources.
    fn row(&self, image: &Image) -> Option<&Row> {
        self.rows.get(&image.name()).filter(|row| row.key == image.key)
    }
}

fn row(line: &str) -> Result<(Name, Row), String> {
    let cells: Vec<&str> = line.split(',').collect();
    let [arch, kernel, key, resources @ ..] = &cells[..] else {
        return Err(format!("{line:?} has too few columns"));
    };
    let arch = Arch::ALL
        .into_iter()
        .find(|known| known.name() == *arch)
        .ok_or_else(|| format!("the architecture is {arch:?}"))?;
    let number = |cell: &str| cell.parse().map_err(|_| format!("a resource is {cell:?}"));
    let resources = match *resources {
        ["", "", ""] if arch.is_ptx() => None,
        [registers, shared, instructions] if !arch.is_ptx() => Some(Resources {
            registers: number(registers)?,
            shared_bytes: number(shared)?,
            instructions: number(instructions)?,
        }),
        _ => return Err(format!("{line:?} is not of the columns {COLUMNS:?}")),
    };
    let row = Row { key: (*key).to_owned(), resources };
    Ok(((arch.name(), (*kernel).to_owned()), row))
}

/// What is wrong, in words.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Wrong {
    /// With images.
    pub(crate) defects: Vec<String>,
    /// With rows.
    pub(crate) rows: Vec<String>,
}

/// Compares a table with the sources. Images without a row of their sources are compiled, and a
/// sample of the others, which another `seed` changes; all by another release than the table's.
///
/// # Errors
/// Those of `compile`.
pub(crate) fn check<E>(
    table: &Table,
    images: &[Image],
    release: &str,
    seed: &str,
    compile: impl FnOnce(&[Image]) -> Result<Vec<Report>, E>,
) -> Result<Wrong, E> {
    let mut wrong = Wrong::default();
    let known: BTreeSet<Name> = images.iter().map(Image::name).collect();
    for (arch, kernel) in table.rows.keys().filter(|name| !known.contains(*name)) {
        wrong.rows.push(format!("{arch} {kernel}: a row without a kernel"));
    }

    let (mut fresh, stale): (Vec<Image>, Vec<Image>) =
        images.iter().cloned().partition(|image| table.row(image).is_some());
    if let Some(first) = stale.first() {
        wrong.rows.push(format!(
            "{} of {} images have no row with the key of their sources, the first is {first}",
            stale.len(),
            images.len()
        ));
    }
    let is_comparable = table.release == release;
    if is_comparable {
        fresh.sort_by_cached_key(|image| Sha256::digest(format!("{seed} {image}")).to_vec());
        fresh.truncate(SAMPLE);
        println!("{} images to compile, and a sample of {}", stale.len(), fresh.len());
    } else {
        println!(
            "all images are compiled, and resources are not compared: the table is of NVRTC {}, \
             and this is {release}",
            table.release
        );
    }

    let mut compiled = [stale, fresh].concat();
    compiled.sort_by_cached_key(Image::name);
    let reports = compile(&compiled)?;
    for (image, report) in compiled.iter().zip(&reports) {
        let resources = Resources::of(report);
        println!("{image}: {}", Words(resources));
        for warning in &report.warnings {
            println!("{warning}");
        }
        wrong.defects.extend(defects(image, report));
        let row = table.row(image).filter(|row| row.resources != resources);
        if let Some(row) = row.filter(|_| is_comparable) {
            wrong.rows.push(format!(
                "{image}: {} in the table, {} compiled: delete the row, to have it written anew",
                Words(row.resources),
                Words(resources)
            ));
        }
    }
    Ok(wrong)
}

/// The table of the sources: rows of `old` that are of them and of the same release, and new ones
/// for the others, which are compiled. Prints what changes. Images with defects have no row.
///
/// # Errors
/// Those of `compile`.
pub(crate) fn record<E>(
    old: &Table,
    images: &[Image],
    release: &str,
    compile: impl FnOnce(&[Image]) -> Result<Vec<Report>, E>,
) -> Result<(Table, Wrong), E> {
    let (mut rows, mut compiled) = (BTreeMap::new(), Vec::new());
    for image in images {
        match old.row(image).filter(|_| old.release == release) {
            Some(row) => drop(rows.insert(image.name(), row.clone())),
            None => compiled.push(image.clone()),
        }
    }
    println!("{} rows are kept, {} images are compiled", rows.len(), compiled.len());
    let mut wrong = Wrong::default();
    for (image, report) in compiled.iter().zip(compile(&compiled)?) {
        let defects = defects(image, &report);
        if defects.is_empty() {
            let resources = Resources::of(&report);
            rows.insert(image.name(), Row { key: image.key.clone(), resources });
        }
        wrong.defects.extend(defects);
    }
    let new = Table { release: release.to_owned(), rows };
    for change in changes(old, &new) {
        println!("{change}");
    }
    Ok((new, wrong))
}

fn defects(image: &Image, report: &Report) -> Vec<String> {
    let of = |defect| format!("{}: {defect}", image.arch.name());
    report.defects().into_iter().map(of).collect()
}

/// Rows that come, go and change their resources.
fn changes(old: &Table, new: &Table) -> Vec<String> {
    let names: BTreeSet<&Name> = old.rows.keys().chain(new.rows.keys()).collect();
    let change = |name: &Name| {
        let [was, is] =
            [old, new].map(|table| table.rows.get(name).map(|row| Words(row.resources)));
        let (arch, kernel) = name;
        let words = match (was, is) {
            (Some(was), Some(is)) if was.0 == is.0 => return None,
            (Some(was), Some(is)) => format!("{is}, was {was}"),
            (None, Some(is)) => format!("{is}, new"),
            (_, None) => "gone".to_owned(),
        };
        Some(format!("{arch} {kernel}: {words}"))
    };
    names.into_iter().filter_map(change).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::convert::Infallible;

    const RELEASE: &str = "13.0.88";

    fn image(arch: Arch, name: &str) -> Image {
        let (name, text) = (name.to_owned(), "text".to_owned());
        Image::new(arch, Source { name, text, ptx: Arch::Compute80 })
    }

    /// More than a sample, in the table's order.
    fn images() -> Vec<Image> {
        let cubins = ["a", "b", "c", "d", "e", "f", "g", "h"];
        let cubins = cubins.map(|name| image(Arch::Sm90a, name));
        [image(Arch::Compute80, "p")].into_iter().chain(cubins).collect()
    }

    fn changed(image: &Image) -> Image {
        let source = Source { text: "changed".to_owned(), ..image.source.clone() };
        Image::new(image.arch, source)
    }

    fn report(image: &Image) -> Report {
        let function = FunctionReport {
            function: image.source.name.clone(),
            registers: 32,
            stack_bytes: 0,
            spill_store_bytes: 0,
            spill_load_bytes: 0,
            shared_bytes: 128,
            instructions: 64,
            serialized: false,
        };
        let small = FunctionReport { registers: 8, shared_bytes: 0, ..function.clone() };
        let functions = if image.arch.is_ptx() { vec![] } else { vec![function, small] };
        Report { name: image.source.name.clone(), functions, warnings: Vec::new() }
    }

    fn spilling(image: &Image) -> Report {
        let mut report = report(image);
        report.functions.iter_mut().for_each(|function| function.spill_store_bytes = 4);
        report
    }

    fn table() -> Table {
        recorded(&Table::default(), &images(), report).0
    }

    fn recorded(
        old: &Table,
        images: &[Image],
        report: fn(&Image) -> Report,
    ) -> (Table, Wrong, usize) {
        let compiled = RefCell::new(0);
        let compile = |images: &[Image]| {
            *compiled.borrow_mut() += images.len();
            Ok::<_, Infallible>(images.iter().map(report).collect())
        };
        let Ok((table, wrong)) = record(old, images, RELEASE, compile);
        (table, wrong, compiled.into_inner())
    }

    /// What is wrong, and the kernels that were compiled.
    fn checked(
        table: &Table,
        images: &[Image],
        seed: &str,
        report: fn(&Image) -> Report,
    ) -> (Wrong, Vec<String>) {
        let mut names = Vec::new();
        let compile = |images: &[Image]| {
            names.extend(images.iter().map(|image| image.source.name.clone()));
            Ok::<_, Infallible>(images.iter().map(report).collect())
        };
        let Ok(wrong) = check(table, images, RELEASE, seed, compile);
        (wrong, names)
    }

    #[test]
    fn a_table_comes_back_as_it_was_and_has_one_line_an_image() {
        let text = table().to_string();
        assert_eq!(Table::parse(&text), Ok(table()));
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 2 + images().len());
        let [ptx, a, ..] = &images()[..] else { panic!("two images") };
        assert_eq!(lines[0], "# flux kernel images, NVRTC 13.0.88");
        assert_eq!(
            lines[2..4],
            [format!("compute_80,p,{},,,", ptx.key), format!("sm_90a,a,{},32,128,128", a.key)]
        );
    }

    #[test]
    fn what_is_no_table_is_refused_with_its_line() {
        let text = table().to_string();
        let a = text.lines().nth(3).unwrap();
        for (was, becomes, said) in [
            ("NVRTC ", "nvcc ", "the first lines are not"),
            ("kernel,key", "kernel", "the first lines are not"),
            ("sm_90a,a,", "sm_91,a,", "line 4: the architecture is \"sm_91\""),
            (",32,128,128\nsm_90a,b", ",many,128,128\nsm_90a,b", "line 4: a resource is \"many\""),
            (",32,128,128\nsm_90a,b", ",,,\nsm_90a,b", "line 4: a resource is \"\""),
            (",,,\n", ",32,128,128\n", "line 3: \"compute_80,p,"),
            (",,,\n", "\n", "line 3: \"compute_80,p,"),
            (a, "<<<<<<< HEAD", "line 4: \"<<<<<<< HEAD\" has too few columns"),
            (a, &format!("{a}\n{a}"), "line 5: sm_90a a is not in order"),
            ("sm_90a,a,", "sm_90a,x,", "line 5: sm_90a b is not in order"),
        ] {
            let error = Table::parse(&text.replacen(was, becomes, 1)).unwrap_err();
            assert!(error.starts_with(said), "{error}");
        }
        assert!(Table::parse("").is_err());
    }

    #[test]
    fn a_sample_of_a_table_that_fits_is_compiled_and_changes_with_the_seed() {
        let (wrong, names) = checked(&table(), &images(), "seed", report);
        assert_eq!(wrong, Wrong::default());
        assert_eq!(names.len(), SAMPLE);
        assert_eq!(checked(&table(), &images(), "seed", report).1, names);
        assert!(
            (0..8).any(|seed| checked(&table(), &images(), &seed.to_string(), report).1 != names)
        );
    }

    #[test]
    fn a_changed_source_and_a_missing_row_are_compiled_and_are_wrong() {
        let mut images = images();
        images[3] = changed(&images[3]);
        let mut table = table();
        table.rows.remove(&images[5].name());
        let (wrong, names) = checked(&table, &images, "seed", report);
        assert!(["c", "e"].iter().all(|stale| names.iter().any(|name| name == stale)));
        assert_eq!(names.len(), 2 + SAMPLE);
        assert_eq!(
            wrong.rows,
            ["2 of 9 images have no row with the key of their sources, the first is sm_90a c"]
        );
        assert!(wrong.defects.is_empty());
        let (wrong, _) = checked(&table, &images, "seed", spilling);
        assert!(
            wrong.defects.iter().any(|defect| defect.starts_with("sm_90a: c: c: spills registers"))
        );
    }

    #[test]
    fn a_row_without_a_kernel_is_wrong() {
        let (table, images) = (table(), images());
        let (wrong, _) = checked(&table, &images[..8], "seed", report);
        assert_eq!(wrong.rows, ["sm_90a h: a row without a kernel"]);
    }

    #[test]
    fn other_resources_of_the_sample_are_wrong_unless_another_release_gave_them() {
        let mut table = table();
        let wrong_registers = |row: &mut Row| {
            row.resources = row.resources.map(|of| Resources { registers: 31, ..of });
        };
        table.rows.values_mut().for_each(wrong_registers);
        let (wrong, _) = checked(&table, &images()[1..7], "seed", report);
        let rows = wrong
            .rows
            .iter()
            .filter(|row| row.contains("31 registers") && row.contains("32 registers"));
        assert_eq!(rows.count(), SAMPLE, "{wrong:?}");
        table.release = "13.1.2".to_owned();
        assert_eq!(checked(&table, &images(), "seed", report).0, Wrong::default());
        let (wrong, _) = checked(&table, &images(), "seed", spilling);
        assert!(wrong.defects.len() >= 5, "{wrong:?}");
    }

    #[test]
    fn a_record_compiles_what_has_changed_and_keeps_the_other_rows() {
        let (old, mut images) = (table(), images());
        assert_eq!(recorded(&old, &images, report), (old.clone(), Wrong::default(), 0));
        images[3] = changed(&images[3]);
        images.remove(8);
        images.push(image(Arch::Sm90a, "i"));
        let (new, wrong, compiled) = recorded(&old, &images, report);
        assert_eq!((wrong, compiled), (Wrong::default(), 2));
        assert_eq!(checked(&new, &images, "seed", report).0, Wrong::default());
        assert_eq!(
            changes(&old, &new),
            [
                "sm_90a h: gone",
                "sm_90a i: 32 registers, 128 B static shared, 128 instructions, new"
            ]
        );
        let other = Table { release: "13.1.2".to_owned(), ..new.clone() };
        assert_eq!(recorded(&other, &images, report), (new, Wrong::default(), images.len()));
    }

    #[test]
    fn an_image_with_defects_has_no_row() {
        let (old, mut images) = (table(), images());
        images[3] = changed(&images[3]);
        let (new, wrong, _) = recorded(&old, &images, spilling);
        assert_eq!(wrong.defects.len(), 2);
        assert_eq!(new.rows.len(), images.len() - 1);
        assert_eq!(changes(&old, &new), ["sm_90a c: gone"]);
    }

    #[test]
    fn changed_resources_are_said() {
        let [old, mut new] = [table(), table()];
        let row = new.rows.get_mut(&("sm_90a", "a".to_owned())).unwrap();
        row.resources = row.resources.map(|of| Resources { registers: 40, ..of });
        assert_eq!(
            changes(&old, &new),
            ["sm_90a a: 40 registers, 128 B static shared, 128 instructions, \
              was 32 registers, 128 B static shared, 128 instructions"]
        );
    }

    #[test]
    fn images_have_one_name_each() {
        let names: BTreeSet<(&str, String)> =
            sources().map(|(arch, source)| (arch.name(), source.name)).collect();
        assert_eq!(names.len(), sources().count());
        assert!(ARCHS.iter().all(|arch| names.iter().any(|name| name.0 == arch.name())));
    }
}
