//! What a call has of each of its weights.
//!
//! Invariant: values are in the order of the weights, and at most [`MAX_WEIGHTS`].

use super::MAX_WEIGHTS;

/// A value for each weight of a call, in their order, without allocation.
///
/// ```
/// use flux_core::problem::WeightList;
/// let mut columns = WeightList::one(64);
/// columns.push(16)?;
/// assert_eq!((columns.len(), columns[1]), (2, 16));
/// assert_eq!(columns.map(|n| n / 2).iter().sum::<u32>(), 40);
/// # Ok::<(), u32>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightList<T> {
    /// `None` behind the last.
    values: [Option<T>; MAX_WEIGHTS],
}

impl<T> WeightList<T> {
    /// No weight.
    pub const fn new() -> Self {
        Self { values: [const { None }; MAX_WEIGHTS] }
    }

    /// One weight.
    pub fn one(value: T) -> Self {
        let mut list = Self::new();
        list.values[0] = Some(value);
        list
    }

    /// Appends a value, or gives it back where there are [`MAX_WEIGHTS`].
    ///
    /// # Errors
    /// The value.
    pub fn push(&mut self, value: T) -> Result<(), T> {
        match self.values.iter_mut().find(|place| place.is_none()) {
            Some(place) => {
                *place = Some(value);
                Ok(())
            }
            None => Err(value),
        }
    }

    /// Number of weights.
    pub fn len(&self) -> usize {
        self.iter().count()
    }

    /// Whether there is no weight.
    pub const fn is_empty(&self) -> bool {
        self.values[0].is_none()
    }

    /// The values in their order.
    pub fn iter(&self) -> impl Iterator<Item = &T> + Clone {
        self.values.iter().flatten()
    }

    /// The values in their order, to be written.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.values.iter_mut().flatten()
    }

    /// Another value for each weight.
    pub fn map<U>(self, mut to: impl FnMut(T) -> U) -> WeightList<U> {
        WeightList { values: self.values.map(|value| value.map(&mut to)) }
    }
}

impl<T> Default for WeightList<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> std::ops::Index<usize> for WeightList<T> {
    type Output = T;

    /// # Panics
    /// If there is no weight of this number.
    fn index(&self, weight: usize) -> &T {
        let value = self.values.get(weight).and_then(Option::as_ref);
        value.unwrap_or_else(|| panic!("weight {weight} of {}", self.len()))
    }
}
